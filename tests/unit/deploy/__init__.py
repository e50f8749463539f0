"""What is in deploy/, held against the program and against Kubernetes."""
