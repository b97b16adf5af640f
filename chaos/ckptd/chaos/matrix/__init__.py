"""The matrix: a fault at every boundary of the protocol, in every role that passes it, on both stores."""
