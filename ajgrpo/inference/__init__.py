"""The wire to the rollout server: one description of its HTTP API, and one client."""
