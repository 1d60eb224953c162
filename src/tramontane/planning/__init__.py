"""What a run will take before it is run: costs of the workers, a simulation of the pipeline, and
the split of GPUs between generators and trainers."""
