"""Events as scalars of TensorBoard."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .base import Event, Monitor
from .files import open_folder
from .packages import load_package

__all__ = ["TensorBoardMonitor"]


class TensorBoardMonitor(Monitor):
    """Writes event files in ``output_path/job_name``, a new file at each start. TensorBoard shows all of them as one
    run. The configuration is written as the text ``config``.
    """

    key = "tensorboard"
    on_failure = "free space in the folder of tensorboard.output_path"

    def __init__(self, tensorboard_config: Any) -> None:
        super().__init__(tensorboard_config)
        self.output_path, self.job_name = tensorboard_config.output_path, tensorboard_config.job_name
        self.summary_writer = None
        if self.is_writing:
            load_package("tensorboard", key=self.key)
            module = load_package("torch.utils.tensorboard", key=self.key)
            self.summary_writer = module.SummaryWriter(log_dir=str(open_folder(tensorboard_config, self.key)))

    def get_summary_writer(self) -> Any:
        """The ``SummaryWriter`` of torch; None if this monitor writes nothing."""
        return self.summary_writer

    def write_events(self, event_list: Sequence[Event], flush: bool = True) -> None:
        if self.summary_writer is not None:
            for name, value, step in event_list:
                self.summary_writer.add_scalar(name, value, step)
            if flush:
                self.flush()

    def write_config(self, config: Mapping[str, Any]) -> None:
        if self.summary_writer is not None:
            # TensorBoard renders Markdown: four blanks keep the JSON as it is.
            text = json.dumps(config, indent=2, default=str)
            self.summary_writer.add_text("config", "\n".join(f"    {line}" for line in text.splitlines()))

    def flush(self) -> None:
        if self.summary_writer is not None:
            self.summary_writer.flush()

    def close(self) -> None:
        if self.summary_writer is not None:
            self.summary_writer.close()
