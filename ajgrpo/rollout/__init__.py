"""From a prompt to training samples: the loop, its parts, and the process that it runs in. Never imports jax."""
