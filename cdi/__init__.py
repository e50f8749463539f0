"""Container Device Interface (CDI) spec files: write ours durably, read everyone's, apply them as a runtime does.

Knows nothing of GPUs, kubelets or the rest of gpufrac and imports none of it. `model`, `names`, `version`, `validate`,
`encode`, `decode` and `inject` are pure; the only I/O is in `atomic` (durable files), `writer` (the files we own) and
`registry.scan` (the files of a node). Rules follow the CDI specification and its Go library 1.1.0, which is what
container runtimes read these files with.
"""
