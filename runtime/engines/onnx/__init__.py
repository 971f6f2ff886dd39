"""ONNX Runtime engine."""
