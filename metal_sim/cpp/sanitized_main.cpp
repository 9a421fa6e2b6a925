// A program that runs one dispatch from a file and writes the results back to it: sanitizers cannot join a running
// interpreter. The file is a Dispatch, then each buffer's bytes; buffers are allocated each for itself.
#include <cstdio>
#include <cstdlib>

#include "dispatch.h"

extern "C" void tqsim_dispatch(tqsim::Dispatch* dispatch);

int main(int, char** arguments) {
  static tqsim::Dispatch dispatch;
  FILE* file = fopen(arguments[1], "r+b");
  if (!file || fread(&dispatch, sizeof dispatch, 1, file) != 1) return 3;
  for (uint32_t i = 0; i < dispatch.count; i++) {
    tqsim::Buffer& buffer = dispatch.buffers[i];
    buffer.data = static_cast<char*>(malloc(buffer.bytes));
    if (fread(buffer.data, 1, buffer.bytes, file) != buffer.bytes) return 3;
  }
  tqsim_dispatch(&dispatch);
  rewind(file);
  fwrite(&dispatch, sizeof dispatch, 1, file);
  for (uint32_t i = 0; i < dispatch.count; i++) fwrite(dispatch.buffers[i].data, 1, dispatch.buffers[i].bytes, file);
  return fclose(file);
}
