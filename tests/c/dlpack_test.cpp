// An octile_tensor is a DLPack DLTensor: the same fields and constants, and usable as one.
#include <gtest/gtest.h>

#include "octile/octile.h"

#if __has_include(<dlpack/dlpack.h>)

#include <dlpack/dlpack.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

namespace {

template <class A, class B>
constexpr bool kSameLayout = sizeof(A) == sizeof(B) &&
                             alignof(A) == alignof(B) && std::is_standard_layout_v<A>&& std::is_standard_layout_v<B>;

#define OCTILE_SAME_FIELD(a, field_a, b, field_b)  \
  (offsetof(a, field_a) == offsetof(b, field_b) && \
   sizeof(std::declval<a>().field_a) == sizeof(std::declval<b>().field_b))

static_assert(kSameLayout<octile_tensor, DLTensor>);
static_assert(OCTILE_SAME_FIELD(octile_tensor, data, DLTensor, data));
static_assert(OCTILE_SAME_FIELD(octile_tensor, device, DLTensor, device));
static_assert(OCTILE_SAME_FIELD(octile_tensor, ndim, DLTensor, ndim));
static_assert(OCTILE_SAME_FIELD(octile_tensor, dtype, DLTensor, dtype));
static_assert(OCTILE_SAME_FIELD(octile_tensor, shape, DLTensor, shape));
static_assert(OCTILE_SAME_FIELD(octile_tensor, strides, DLTensor, strides));
static_assert(OCTILE_SAME_FIELD(octile_tensor, byte_offset, DLTensor, byte_offset));

static_assert(kSameLayout<octile_device, DLDevice>);
static_assert(OCTILE_SAME_FIELD(octile_device, type, DLDevice, device_type));
static_assert(OCTILE_SAME_FIELD(octile_device, id, DLDevice, device_id));

static_assert(kSameLayout<octile_element, DLDataType>);
static_assert(OCTILE_SAME_FIELD(octile_element, code, DLDataType, code));
static_assert(OCTILE_SAME_FIELD(octile_element, bits, DLDataType, bits));
static_assert(OCTILE_SAME_FIELD(octile_element, lanes, DLDataType, lanes));

static_assert(OCTILE_DEVICE_CPU == int{kDLCPU} && OCTILE_DEVICE_CUDA == int{kDLCUDA});
static_assert(OCTILE_CODE_INT == int{kDLInt} && OCTILE_CODE_UINT == int{kDLUInt});
static_assert(OCTILE_CODE_FLOAT == int{kDLFloat} && OCTILE_CODE_BFLOAT == int{kDLBfloat});

template <class T>
struct Managed {
  std::vector<T> values;
  std::vector<std::int64_t> shape;
  DLTensor tensor{};

  Managed(std::vector<T> v, std::vector<std::int64_t> s, DLDataType dtype) : values(std::move(v)), shape(std::move(s)) {
    tensor.data = values.data();
    tensor.device = {kDLCPU, 0};
    tensor.ndim = static_cast<int>(shape.size());
    tensor.dtype = dtype;
    tensor.shape = shape.data();
  }
  const octile_tensor* octile() const { return reinterpret_cast<const octile_tensor*>(&tensor); }
};

TEST(Dlpack, ADLTensorIsTakenAsItIs) {
  octile_quantize_description description;
  ASSERT_EQ(octile_quantize_description_init(&description, sizeof description), OCTILE_OK);
  description.rows = 2;
  description.cols = 2;
  octile_plan* plan = nullptr;
  ASSERT_EQ(octile_quantize_plan_create(&description, &plan), OCTILE_OK) << octile_last_error();

  const Managed<float> x({127, -2, 1, 254}, {2, 2}, {kDLFloat, 32, 1});
  const Managed<std::int8_t> q({0, 0, 0, 0}, {2, 2}, {kDLInt, 8, 1});
  const Managed<float> scale({0, 0}, {2}, {kDLFloat, 32, 1});
  octile_quantize_args args{};
  args.struct_size = sizeof args;
  args.x = x.octile();
  args.q = q.octile();
  args.scale = scale.octile();
  std::vector<std::byte> workspace(octile_plan_workspace_size(plan));
  EXPECT_EQ(octile_quantize_run(plan, &args, workspace.data(), workspace.size(), nullptr), OCTILE_OK)
      << octile_last_error();
  octile_plan_destroy(plan);

  EXPECT_EQ(q.values, (std::vector<std::int8_t>{127, -2, 0, 127}));  // 1 / 2 is a tie
  EXPECT_EQ(scale.values, (std::vector<float>{1, 2}));
}

}  // namespace

#else

TEST(Dlpack, ADLTensorIsTakenAsItIs) { GTEST_SKIP() << "dlpack/dlpack.h is not installed (libdlpack-dev)"; }

#endif
