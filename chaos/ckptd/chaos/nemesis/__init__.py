"""What hurts a cluster, one kind of harm a module."""
