// Launches kernels on request: the other end of test_kernels_shim.py.
//
//   driver --list    the names of all kernels, one a line
//   driver           requests on standard input, answers on standard output, until the input ends
//
// A request is binary, little-endian, without padding:
//   u32 length of the kernel's name, the name, u64 seed, u32 CTAs in x, u32 in y, u32 number of arguments; for each:
//   u8 kind, then   0: u64 number (0 is a null pointer too)   1: u32 offset, u64 size, the bytes
// The answer is the bytes of all buffers after the launch. Whatever goes wrong ends the process with a message.
#include "kernels.hpp"

namespace {

using shim::fail;

// A buffer of its own on the heap, `offset` bytes off a multiple of 16. AddressSanitizer sees the first byte behind it,
// and the first before it where `offset` is 0. What is written there otherwise shows in canaries.
class Buffer {
 public:
  Buffer(size_t offset, size_t size) : start_(kCanaryBytes + offset), size_(size) {
    room_ = static_cast<char*>(std::malloc(start_ + size + kCanaryBytes));
    if (!room_ || (uintptr_t)room_ % 16) fail("no memory, or not aligned");
    std::memset(room_, kCanary, start_ + size + kCanaryBytes);
  }
  Buffer(const Buffer&) = delete;
  ~Buffer() { std::free(room_); }

  char* data() const { return room_ + start_; }
  size_t size() const { return size_; }
  bool is_intact_around() const {
    const auto is_canary = [](char byte) { return byte == kCanary; };
    const char* const end = data() + size_;
    return std::all_of(room_, data(), is_canary) && std::all_of(end, end + kCanaryBytes, is_canary);
  }

 private:
  static constexpr char kCanary = '\x5C';
#ifdef __SANITIZE_ADDRESS__
  static constexpr size_t kCanaryBytes = 0;
#else
  static constexpr size_t kCanaryBytes = 64;
#endif
  size_t start_, size_;
  char* room_;
};

struct Argument {
  u8 kind = 0;
  u64 number = 0;
  std::unique_ptr<Buffer> buffer;
};

// What shim::launch asks for arguments.
struct Arguments {
  const std::vector<Argument>& all;

  size_t size() const { return all.size(); }
  template <class T>
  T as(size_t k) const {
    const Argument& argument = all[k];
    if constexpr (std::is_pointer_v<T>) {
      if (argument.kind == 0 && argument.number) fail("a number where the kernel takes a pointer");
      return argument.buffer ? reinterpret_cast<T>(argument.buffer->data()) : nullptr;
    } else {
      if (argument.kind != 0) fail("a pointer where the kernel takes a number");
      return static_cast<T>(argument.number);
    }
  }
};

void read(void* to, size_t size) {
  if (std::fread(to, 1, size, stdin) != size) fail("the request ends too early");
}

template <class T>
T read() {
  T value;
  read(&value, sizeof value);
  return value;
}

Argument read_argument() {
  Argument argument;
  argument.kind = read<u8>();
  if (argument.kind == 0) {
    argument.number = read<u64>();
  } else if (argument.kind == 1) {
    const u32 offset = read<u32>();
    argument.buffer = std::make_unique<Buffer>(offset, read<u64>());
    read(argument.buffer->data(), argument.buffer->size());
  }
  return argument;
}

void serve(u32 name_length) {
  std::string name(name_length, ' ');
  read(&name[0], name_length);
  shim::Shape shape;
  shape.seed = read<u64>();
  shape.grid_x = read<u32>();
  shape.grid_y = read<u32>();
  std::vector<Argument> arguments;
  const u32 num_arguments = read<u32>();
  for (u32 k = 0; k < num_arguments; k++) arguments.push_back(read_argument());

  shim::launch_by_name(name, shape, Arguments{arguments});

  for (const Argument& argument : arguments) {
    if (!argument.buffer) continue;
    if (!argument.buffer->is_intact_around()) fail(name + " wrote outside of a buffer");
    std::fwrite(argument.buffer->data(), 1, argument.buffer->size(), stdout);
  }
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1 && std::string(argv[1]) == "--list") {
    for (const auto& kernel : shim::kernels<Arguments>()) std::puts(kernel.first.c_str());
    return 0;
  }
  u32 name_length;
  while (std::fread(&name_length, sizeof name_length, 1, stdin) == 1) serve(name_length);
  return 0;
}
