"""What a run needs around the script: nodes with an agent each, a launcher on each node, and a store."""
