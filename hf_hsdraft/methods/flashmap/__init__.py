"""Drafters of whole blocks of tokens by a flow map from noise (FlashMap), in the files of their authors."""
