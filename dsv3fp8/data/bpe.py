"""A byte-level BPE of the corpus's own: one training on the training split, no text outside its reach.

Its base is the 256 bytes, so it has no unknown token; its last id ends a document.
"""

from collections.abc import Iterator

from dsv3fp8.data.tokenizer import SubwordTokenizer

END = "<|endoftext|>"


def train_bpe(texts: Iterator[str], vocab_size: int) -> SubwordTokenizer:
    """Learn `vocab_size` tokens, end of document included; fewer where the text has no more pairs to merge."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    engine = Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    engine.train_from_iterator(texts, trainer)
    engine.add_special_tokens([END])
    return SubwordTokenizer(engine.to_str(), f"bpe of {engine.get_vocab_size()}", END)
