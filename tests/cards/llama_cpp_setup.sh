#!/usr/bin/env bash
# Make the environment of llama.cpp, a build of it and its converter: bash tests/cards/llama_cpp_setup.sh FOLDER
set -euo pipefail
python3 -m venv "$1"
# the version of transformers that the converter requires
"$1/bin/pip" install --quiet xllamacpp==2026.10.11549 torch==2.13.0 transformers==4.57.6 sentencepiece "protobuf<5"
# the sources of llama-cpp-python have llama.cpp's converter, which its builds have not
"$1/bin/pip" download --quiet --no-deps --no-binary :all: --dest "$1/sdist" llama-cpp-python==0.3.36
tar --extract --gzip --file "$1"/sdist/llama_cpp_python-*.tar.gz --directory "$1" --strip-components 1 \
  --wildcards '*/vendor/llama.cpp/*'
rm -r "$1/sdist"
echo "export LLAMA_CPP=$1"
