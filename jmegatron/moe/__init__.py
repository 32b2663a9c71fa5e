"""Mixture of experts: router, exchange of tokens over ep, experts. See README.md."""
