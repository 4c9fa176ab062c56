// The kernels as a shared library: the other end of shim_device.py. A launch runs on the memory of the process that asks
// for it, and returns when it is done.
#include "kernels.hpp"

#include <mutex>

namespace {

// Addresses and numbers, as the launcher packs them.
struct Words {
  const u64* words;
  size_t count;

  size_t size() const { return count; }
  template <class T>
  T as(size_t k) const {
    if constexpr (std::is_pointer_v<T>) {
      return reinterpret_cast<T>(words[k]);
    } else {
      return static_cast<T>(words[k]);
    }
  }
};

}  // namespace

extern "C" void shim_launch(const char* name, u32 grid_x, u32 grid_y, const u64* words, u64 count) {
  static std::mutex one_at_a_time;  // autograd's threads launch too, and there is one shared memory
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  shim::Shape shape;
  shape.grid_x = grid_x;
  shape.grid_y = grid_y;
  shim::launch_by_name(name, shape, Words{words, count});
}
