"""Pretrained networks: autoencoders, text encoders and vision networks; `Encoders` are those of one model."""
