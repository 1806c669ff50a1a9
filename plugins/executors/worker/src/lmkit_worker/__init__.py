"""The worker in torch: loads a model, runs its steps, samples."""
