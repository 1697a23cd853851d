// What the custom calls have in common: buffers of XLA as arrays.

#ifndef TRENCADIS_BUFFERS_H_
#define TRENCADIS_BUFFERS_H_

#include <algorithm>
#include <cstdint>
#include <exception>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "places.h"
#include "tiles.h"
#include "xla/ffi/api/ffi.h"

namespace trencadis {

namespace ffi = xla::ffi;

inline ffi::Error wrong(const std::string& what) { return ffi::Error(ffi::ErrorCode::kInvalidArgument, "trencadis_cpu: " + what); }

// The buffers that follow the first ones, one after the other; those that are not there are null.
class Rest {
 public:
  explicit Rest(ffi::RemainingArgs args) : args_(args) {}

  // The next buffer, if it is there at all; an error is kept if its numbers are not T, or not as many.
  template <class T>
  T* next(bool there, Index count) {
    if (!there) return nullptr;
    ffi::ErrorOr<ffi::AnyBuffer> found = args_.get<ffi::AnyBuffer>(used_++);
    if (found.has_error() || found->element_type() != ffi::DataType(ffi::internal::NativeTypeToCApiDataType<T>()) ||
        static_cast<Index>(found->element_count()) != count) {
      ok_ = false;
      return nullptr;
    }
    return static_cast<T*>(found->untyped_data());
  }

  // The same for a buffer like another.
  const char* next(bool there, ffi::AnyBuffer like) {
    if (!there) return nullptr;
    ffi::ErrorOr<ffi::AnyBuffer> found = args_.get<ffi::AnyBuffer>(used_++);
    if (found.has_error() || found->element_type() != like.element_type() || found->size_bytes() != like.size_bytes()) {
      ok_ = false;
      return nullptr;
    }
    return static_cast<const char*>(found->untyped_data());
  }

  bool ok() const { return ok_ && used_ == args_.size(); }
  bool right() const { return ok_; }  // of those that were asked for
  std::size_t used() const { return used_; }

 private:
  ffi::RemainingArgs args_;
  std::size_t used_ = 0;
  bool ok_ = true;
};

// A buffer whose elements are float32 or bfloat16; indices are in elements.
struct Array {
  char* data;
  Index size;  // of an element, in bytes
  bool narrow;

  explicit Array(ffi::AnyBuffer x)
      : data(static_cast<char*>(x.untyped_data())),
        size(static_cast<Index>(ffi::ByteWidth(x.element_type()))),
        narrow(x.element_type() == ffi::DataType::BF16) {}

  char* at(Index i) const { return data + i * size; }
};

// A part of a result that no group writes.
inline Product zeros(const Array& c, Index start, Index m, Index n, Index stride) {
  return Product{m, n, 0, {nullptr, 0, true}, {nullptr, 0, true}, c.at(start), stride, c.narrow};
}

// The largest tile that was asked for, as far as there is memory for it; null if there is none.
inline std::optional<Limits> limits_of(ffi::Span<const std::int64_t> tile) {
  if (tile.size() != 3 || std::min({tile[0], tile[1], tile[2]}) < 1) return std::nullopt;
  return Limits{tile[0], std::min(tile[1], kBlock), std::min(tile[2], kColumns)};
}

// Run what computes, if all arrays are of dtypes that it knows; whatever it throws is an error of the call.
template <class F>
ffi::Error checked(std::initializer_list<ffi::AnyBuffer> arrays, const F& function) {
  for (const ffi::AnyBuffer& each : arrays) {
    if (each.element_type() != ffi::DataType::F32 && each.element_type() != ffi::DataType::BF16) {
      return wrong("want float32 or bfloat16");
    }
  }
  try {
    return function();
  } catch (const std::exception& error) {
    return ffi::Error(ffi::ErrorCode::kInternal, error.what());
  }
}

}  // namespace trencadis

#endif  // TRENCADIS_BUFFERS_H_
