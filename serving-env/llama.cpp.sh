# What `make serving-env ENGINE=llama.cpp` does after pip: build llama-server, llama-quantize and llama-bench, and keep the converter.
# The sources are those that llama-cpp-python carries, MIT as llama.cpp itself. CMAKE_ARGS=-DGGML_CUDA=ON builds for a GPU.
set -e
release=0.3.36 commit=0c1e57098  # commit: that release's CHANGELOG
digest=832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e
env=$(cd "$1" && pwd)
PATH="$env/bin:$PATH"
command -v c++ >/dev/null || { echo "aerie: no C++ compiler (c++) on the PATH; install one: apt-get install g++"; exit 1; }
mkdir -p "$env/sources"
cd "$env/sources"
python -m pip -q --disable-pip-version-check download --no-deps --no-build-isolation --no-binary :all: "llama-cpp-python==$release"
echo "$digest  llama_cpp_python-$release.tar.gz" | sha256sum -c --quiet
tar xzf "llama_cpp_python-$release.tar.gz"
cd "llama_cpp_python-$release/vendor/llama.cpp"
# shellcheck disable=SC2086  # CMAKE_ARGS are words
cmake -B build -G Ninja -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
  -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_COMMIT=$commit $CMAKE_ARGS >"$env/build.log"
echo "building llama.cpp: about ten minutes on two cores; its log is $env/build.log"
cmake --build build --target llama-server llama-quantize llama-bench >>"$env/build.log"
cp build/bin/llama-server build/bin/llama-quantize build/bin/llama-bench "$env/bin"
rm -rf "$env/converter"
mkdir "$env/converter"
mv convert_hf_to_gguf.py conversion gguf-py LICENSE "$env/converter"
rm -rf "$env/sources"
