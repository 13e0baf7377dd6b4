#!/bin/sh
# SGLang without a GPU, with hsformat from this checkout, in a virtual environment of its own: setup_sglang_cpu.sh VENV
. "$(dirname "$0")/common.sh"
make_venv
install sglang_cpu.lock.txt --requirement "$here/sglang_cpu.txt"
install sglang_cpu.lock.txt --no-deps --requirement "$here/sglang_cpu_alone.txt"
install_hsformat sglang_cpu.lock.txt
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$venv/bin/python" "$here/declare_torchvision.py" "$site/torchvision/__init__.py"
rm -rf "$site/sgl_kernel"
cp -r "$here/sgl_kernel" "$site/"
export SGLANG_USE_CPU_ENGINE=1
check 'import sglang, hsformat; sglang.Engine; import sglang.srt.managers.scheduler
print("sglang", sglang.__version__, "with hsformat", hsformat.__version__)'
