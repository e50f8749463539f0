"""A real containerd of a test's own: `node.Containerd`."""
