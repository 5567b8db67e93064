"""Corpora, tokenizers, and packed batches with a position that can be saved."""

from dsv3fp8.data.batches import Batch, TrainBatches, validation_batches
from dsv3fp8.data.config import DataConfig
from dsv3fp8.data.corpus import Corpus, open_corpus
from dsv3fp8.data.store import TokenStore
from dsv3fp8.data.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "Batch",
    "Corpus",
    "DataConfig",
    "TokenStore",
    "Tokenizer",
    "TrainBatches",
    "load_tokenizer",
    "open_corpus",
    "validation_batches",
]
