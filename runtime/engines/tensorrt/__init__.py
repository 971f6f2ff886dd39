"""TensorRT engine."""
