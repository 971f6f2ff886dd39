"""ONNX target."""
