// All kernels by name, for those who launch them: driver.cpp, a process of its own, and library.cpp, inside of a process.
#pragma once
#include "kernels.cu"

#include <map>
#include <string>
#include <type_traits>

namespace shim {

[[noreturn]] inline void fail(const std::string& what) {
  std::fprintf(stderr, "shim: %s\n", what.c_str());
  std::_Exit(kFailed);
}

struct Shape {
  uint64_t seed = 0;
  unsigned grid_x = 0, grid_y = 0;
};

// Arguments have size(), and as<T>(k): argument k as a parameter of type T.
template <class Arguments, class... Parameters, size_t... K>
void launch_with(void (*kernel)(Parameters...), Shape shape, const Arguments& arguments, std::index_sequence<K...>) {
  launch(shape.grid_x, shape.grid_y, kThreads, shape.seed,
         [&] { kernel(arguments.template as<Parameters>(K)...); });
}

template <class Arguments, class... Parameters>
void launch_kernel(void (*kernel)(Parameters...), Shape shape, const Arguments& arguments) {
  if (arguments.size() != sizeof...(Parameters)) fail("wrong number of arguments");
  launch_with(kernel, shape, arguments, std::index_sequence_for<Parameters...>());
}

template <class Arguments>
using Kernels = std::map<std::string, void (*)(Shape, const Arguments&)>;

#define KERNEL(name) \
  { #name, [](Shape shape, const Arguments& arguments) { launch_kernel(&::name, shape, arguments); } }
#define FORMAT_KERNELS(F)                                                                                   \
  KERNEL(scan_values_##F), KERNEL(pack_values_##F), KERNEL(apply_values_##F), KERNEL(scan_exponents_##F),  \
      KERNEL(pack_exponents_##F), KERNEL(split_##F), KERNEL(merge_rows_##F), KERNEL(hash_blocks_##F),      \
      KERNEL(pack_blocks_##F), KERNEL(scan_symbols_##F), KERNEL(pack_symbols_##F), KERNEL(put_nibbles_##F), \
      KERNEL(merge_symbols_##F)

template <class Arguments>
const Kernels<Arguments>& kernels() {
  static const Kernels<Arguments> all = {
      FORMAT_KERNELS(bf16),    FORMAT_KERNELS(fp16), FORMAT_KERNELS(fp32), KERNEL(apply_exponents), KERNEL(put_blocks),
      KERNEL(copy_out_16),     KERNEL(copy_out_32),  KERNEL(write_head),   KERNEL(check_heads),     KERNEL(checksum),
      KERNEL(finish_checksums)};
  return all;
}

template <class Arguments>
void launch_by_name(const std::string& name, Shape shape, const Arguments& arguments) {
  const auto found = kernels<Arguments>().find(name);
  if (found == kernels<Arguments>().end()) fail("no kernel " + name);
  found->second(shape, arguments);
}

}  // namespace shim
