"""The embedded trainer: one process, plain torch, a LoRA or all weights. Only its modules other than client and server
import torch."""
