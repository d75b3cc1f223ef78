"""Settings of judging, which are also the options of ``kernelformer judge``; nothing here needs torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from kernelformer.pipelines.convert_settings import ConvertSettings
from kernelformer.settings import Settings, option, same_option

# Settings of a conversion that change no weight.
JUDGED = ("passkeys", "passkey_lengths", "sample_tokens", "probe", "judge_minutes", "no_judge")


@dataclass(frozen=True, kw_only=True)
class JudgeSettings(Settings):
    """How to judge a converted model; the settings of a conversion of the same names."""

    text: Path | None = option(None, "texts to measure on; default: random tokens")
    length: int | None = option(None, "tokens of a text; default: as in the conversion", least=2)
    samples: int = same_option(ConvertSettings, "samples")
    batch: int = same_option(ConvertSettings, "batch")
    allow_pickle: bool = same_option(ConvertSettings, "allow_pickle")
    seed: int = same_option(ConvertSettings, "seed")
    passkeys: int = same_option(ConvertSettings, "passkeys")
    passkey_lengths: tuple[int, ...] = same_option(ConvertSettings, "passkey_lengths")
    sample_tokens: int | None = same_option(ConvertSettings, "sample_tokens")
    probe: int = same_option(ConvertSettings, "probe")
    judge_minutes: float | None = same_option(ConvertSettings, "judge_minutes")

    @classmethod
    def of(cls, setting: ConvertSettings) -> JudgeSettings:
        """Take those of a conversion."""
        return cls(**{x.name: getattr(setting, x.name) for x in fields(cls)})
