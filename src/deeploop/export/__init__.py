"""Trained models for other engines: transformers, vLLM, mlx-lm and llama.cpp."""
