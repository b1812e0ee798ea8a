"""The sharded train step: mesh and sharding rules, optimizer, accumulation and update, checkpoints, progress."""
