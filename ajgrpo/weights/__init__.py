"""New weights from the trainer to the rollout server: what is sent, in which bytes, over which wire."""
