"""Documents of a Hugging Face data set, by name on the hub or by local path. Needs the extra `hf`."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsv3fp8.data.config import DataConfig
from dsv3fp8.data.readers import Piece, as_document
from dsv3fp8.data.sources import SourceFile
from dsv3fp8.errors import UserError


@dataclass
class HuggingFaceSource:
    """One split of a data set, one document a row."""

    key: str
    name: str
    identity: str
    rows: Any  # datasets.Dataset
    text_key: str
    files: list[SourceFile] = field(default_factory=list)  # the package keeps its own
    unreadable: list[str] = field(default_factory=list)

    @classmethod
    def find(cls, config: DataConfig, split: str) -> "HuggingFaceSource":
        """Load `split`. Raises UserError if the package, the data set, the split or the text column is not there."""
        assert config.dataset is not None, "validate() asks for it"
        rows = _load(config.dataset, config.subset, split)
        if config.text_key not in rows.column_names:
            names = ", ".join(rows.column_names[:8])
            raise UserError(f"data.text_key={config.text_key}: {config.dataset} has no such column (it has {names})")
        name = "/".join(part for part in (config.dataset, config.subset, split) if part)
        # The package's fingerprint covers the files and everything done to them since.
        return cls("data.dataset", name, f"{rows._fingerprint}/{len(rows)}/{split}/{config.text_key}", rows, config.text_key)

    def read(self) -> Iterator[Piece]:
        """Every row in order."""
        for number, row in enumerate(self.rows.select_columns([self.text_key])):
            yield from as_document(row[self.text_key], f"{self.name}: row {number}: {self.text_key!r}")


def _load(dataset: str, subset: str | None, split: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise UserError("data.source=huggingface needs the package datasets: pip install 'dsv3fp8[hf]'") from error
    try:
        if (Path(dataset) / "dataset_dict.json").is_file():
            return _split_of(datasets.load_from_disk(dataset), dataset, split)
        if (Path(dataset) / "state.json").is_file():  # a single split, without a name
            return _split_of({"train": datasets.load_from_disk(dataset)}, dataset, split)
        return datasets.load_dataset(dataset, subset, split=split)
    except UserError:
        raise
    except Exception as error:  # the package has no base class of its own, and passes on those of a dozen others
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(
            f"data.dataset={dataset}, data.subset={subset}, data.split={split}: cannot be loaded ({reason}); "
            "correct the name or path, or download it first where there is no network"
        ) from error


def _split_of(splits: Any, dataset: str, split: str) -> Any:
    if split not in splits:
        raise UserError(f"data.split={split}: {dataset} has no such split (it has {', '.join(splits)})")
    return splits[split]
