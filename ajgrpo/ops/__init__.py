"""Array operations of the forward pass: tree attention and the head's log-probs. Each has a dense reference."""
