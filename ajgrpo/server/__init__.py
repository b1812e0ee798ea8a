"""The embedded rollout server: the HTTP interface of vLLM's used parts, over the project's own JAX models."""
