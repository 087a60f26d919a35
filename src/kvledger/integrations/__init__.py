"""kvledger inside other people's engines and models, one module for each."""
