"""TensorRT: the build bundle that can be made anywhere, and the engine that is built where the GPU is."""
