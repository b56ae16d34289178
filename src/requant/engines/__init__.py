"""What an inference engine makes of a checkpoint: pure rules over its config, its names and its shapes."""
