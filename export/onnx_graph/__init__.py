"""ONNX graphs of compressed models, as the exports to ONNX Runtime and TensorRT write them."""
