"""One trainer over several GPUs."""
