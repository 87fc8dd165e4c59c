"""Trained models for other engines: transformers and vLLM."""
