#include "tensor.h"

#include <charconv>
#include <limits>

#include "error.h"

namespace rewright {
namespace {

struct Known {
  const char* name;
  int bits;
};

constexpr Known kKnown[] = {{"f64", 64},    {"f32", 32},  {"bf16", 16}, {"f16", 16}, {"f8e4m3", 8},
                            {"e8m0", 8},    {"e2m1", 4},  {"i64", 64},  {"i32", 32}, {"byte", 8}};

constexpr int64_t kMost = int64_t{1} << 46;  // elements or bytes: products of two cannot overflow

int64_t parse_size(const std::string& text, size_t& at, const std::string& whole) {
  int64_t value = 0;
  const char* begin = text.data() + at;
  const auto [end, error] = std::from_chars(begin, text.data() + text.size(), value);
  check(error == std::errc() && end != begin && *begin != '-' && value <= kMost, "not a type: " + whole);
  at += static_cast<size_t>(end - begin);
  return value;
}

}  // namespace

int bits_of(DType dtype) { return kKnown[static_cast<int>(dtype)].bits; }
const char* name_of(DType dtype) { return kKnown[static_cast<int>(dtype)].name; }

int64_t Tensor::rows() const {
  int64_t product = 1;
  for (size_t i = 0; i + 1 < shape.size(); ++i) product *= shape[i];
  return product;
}

int64_t Tensor::count() const { return rows() * cols(); }

int64_t Tensor::nbytes() const { return rows() * pitch; }

Tensor parse_type(const std::string& text) {
  const std::string bad = "not a type: " + text;
  const size_t open = text.find('[');
  check(open != std::string::npos && text.back() == ']', bad);
  Tensor tensor;
  bool known = false;
  for (size_t i = 0; i < std::size(kKnown); ++i) {
    if (text.compare(0, open, kKnown[i].name) == 0) {
      tensor.dtype = static_cast<DType>(i);
      known = true;
    }
  }
  check(known, bad);
  size_t at = open + 1;
  int64_t count = 1;
  int64_t pitch = -1;
  while (text[at] != ']') {
    if (text[at] == '|') {
      pitch = parse_size(text, ++at, text);
      check(text[at] == ']', bad);
      break;
    }
    if (!tensor.shape.empty()) {
      check(text[at] == ',', bad);
      ++at;
    }
    tensor.shape.push_back(parse_size(text, at, text));
    const int64_t size = tensor.shape.back();
    check(tensor.shape.size() <= 8 && (size == 0 || count <= kMost / size), bad);
    count *= size;
  }
  check(at + 1 == text.size(), bad);
  const int64_t row = (tensor.cols() * bits_of(tensor.dtype) + 7) / 8;
  check(pitch < 0 || (pitch >= row && !tensor.shape.empty() && (tensor.rows() == 0 || pitch <= kMost / tensor.rows())), bad);
  tensor.pitch = pitch < 0 ? row : pitch;
  check(bits_of(tensor.dtype) < 8 || tensor.pitch % (bits_of(tensor.dtype) / 8) == 0, bad);
  return tensor;
}

}  // namespace rewright
