"""The Transformers extractor on the targets that the engines' suites take: run by ``make test-engines`` as they are.

What ran is compared with ``hsformat/engines/ran``; ``HSFORMAT_CAPTURES=FILE`` writes it anew.
"""

from __future__ import annotations

import importlib.metadata
from typing import ClassVar

from hsformat.testing import ExtractorConformance
from hsformat_extractors.transformers import TransformersExtractor
from tests.engines import real

pytestmark = real.only("transformers")

ANSWERS = ExtractorConformance.test_exactly_the_generated_tokens_are_supervised


class OneArchitecture(real.OneArchitecture):
    __test__ = False
    extractor = TransformersExtractor
    options: ClassVar[dict[str, str]] = {"device": "cpu"}
    test_exactly_the_generated_tokens_are_supervised = ANSWERS


class TestLlama(real.WholeSuite, OneArchitecture):
    __test__ = True
    test_exactly_the_generated_tokens_are_supervised = ANSWERS


class TestQwen3(OneArchitecture):
    __test__ = True
    architecture = "Qwen3ForCausalLM"


class TestMistral(OneArchitecture):
    __test__ = True
    architecture = "MistralForCausalLM"


class TestGemma3(OneArchitecture):
    __test__ = True
    architecture = "Gemma3ForCausalLM"
    test_exactly_the_generated_tokens_are_supervised = None  # this random target ends its turn at once


class TestGemma4(OneArchitecture):
    __test__ = True
    architecture = "Gemma4ForCausalLM"


class TestQwen3Moe(OneArchitecture):
    __test__ = True
    architecture = "Qwen3MoeForCausalLM"


class TestDeepseekV2(OneArchitecture):
    __test__ = True
    architecture = "DeepseekV2ForCausalLM"


class TestDeepseekV3(OneArchitecture):
    __test__ = True
    architecture = "DeepseekV3ForCausalLM"


def test_what_ran_is_what_is_kept():
    """The last test of this file."""
    real.Ran.is_what_is_kept("transformers", importlib.metadata.version("transformers"))
