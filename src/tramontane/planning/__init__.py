"""Plans a run before it starts: costs of the workers, a simulation of the pipeline, and the split
of GPUs between generators and trainers."""
