"""Attention and fused operators: C++ (CPU), Triton (CUDA), and a plain torch reference."""
