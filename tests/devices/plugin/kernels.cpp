// What the device computes: the operations of a model's step, and no more. What Paddle asks for beside these is an error there,
// since nothing runs on the CPU in their stead.
#include <cstdlib>
#include <sstream>

#include "launch.h"
#include "paddle/phi/common/int_array.h"
#include "paddle/phi/common/scalar.h"
#include "paddle/phi/core/custom_kernel.h"

namespace tokasim {

using In = const DenseTensor &;
using Out = DenseTensor *;
using Tensors = const std::vector<const DenseTensor *> &;
using Addends = const std::vector<const phi::TensorBase *> &;
using Outs = std::vector<DenseTensor *>;
using Number = const phi::Scalar &;
using Numbers = const phi::IntArray &;
using Axes = const std::vector<int64_t> &;
using Values = const std::vector<phi::Scalar> &;
using Type = phi::DataType;

#define KERNEL(name, parameters, arguments, ...)                                                     \
    template <typename T, typename Context>                                                          \
    void name##_kernel(const Context &context, ARGUMENTS parameters) {                               \
        launch<__VA_ARGS__>(#name, phi::CppTypeToDataType<T>::Type(), context, ARGUMENTS arguments); \
    }
#define ARGUMENTS(...) __VA_ARGS__
#define KERNEL_2(name, A, B) KERNEL(name, (A a, B b), (a, b), A, B)
#define KERNEL_3(name, A, B, C) KERNEL(name, (A a, B b, C c), (a, b, c), A, B, C)
#define KERNEL_4(name, A, B, C, D) KERNEL(name, (A a, B b, C c, D d), (a, b, c, d), A, B, C, D)
#define KERNEL_5(name, A, B, C, D, E) KERNEL(name, (A a, B b, C c, D d, E e), (a, b, c, d, e), A, B, C, D, E)
#define KERNEL_6(name, A, B, C, D, E, F) KERNEL(name, (A a, B b, C c, D d, E e, F f), (a, b, c, d, e, f), A, B, C, D, E, F)
#define KERNEL_7(name, A, B, C, D, E, F, G) \
    KERNEL(name, (A a, B b, C c, D d, E e, F f, G g), (a, b, c, d, e, f, g), A, B, C, D, E, F, G)

// clang-format off
// elementwise
KERNEL_3(add, In, In, Out) KERNEL_3(subtract, In, In, Out) KERNEL_3(multiply, In, In, Out) KERNEL_3(divide, In, In, Out)
KERNEL_3(floor_divide, In, In, Out) KERNEL_3(remainder, In, In, Out) KERNEL_2(add_n, Addends, Out)
KERNEL_3(equal, In, In, Out) KERNEL_3(less_than, In, In, Out) KERNEL_3(less_equal, In, In, Out)
KERNEL_3(greater_than, In, In, Out) KERNEL_3(greater_equal, In, In, Out) KERNEL_3(logical_or, In, In, Out)
KERNEL_2(exp, In, Out) KERNEL_2(rsqrt, In, Out) KERNEL_2(sigmoid, In, Out) KERNEL_2(silu, In, Out)
KERNEL_3(gelu, In, bool, Out)
KERNEL_4(clip, In, Number, Number, Out) KERNEL_5(scale, In, Number, Number, bool, Out) KERNEL_4(where, In, In, In, Out)
// of rows
KERNEL_4(max, In, Numbers, bool, Out) KERNEL_4(min, In, Numbers, bool, Out) KERNEL_4(mean, In, Numbers, bool, Out)
KERNEL_5(sum, In, Numbers, Type, bool, Out) KERNEL_4(any, In, Axes, bool, Out)
KERNEL_6(cumsum, In, Number, bool, bool, bool, Out) KERNEL_7(topk, In, Number, int, bool, bool, Out, Out)
KERNEL_5(searchsorted, In, In, bool, bool, Out) KERNEL_5(matmul, In, In, bool, bool, Out)
// from one place to another
KERNEL_4(full, Numbers, Number, Type, Out) KERNEL_4(full_like, In, Number, Type, Out) KERNEL_4(arange, Number, Number, Number, Out)
KERNEL_2(assign, In, Out) KERNEL_3(cast, In, Type, Out) KERNEL_3(expand, In, Numbers, Out) KERNEL_3(concat, Tensors, Number, Out)
KERNEL_4(gather, In, In, Number, Out) KERNEL_5(scatter, In, In, In, bool, Out) KERNEL_4(take_along_axis, In, In, int, Out)
KERNEL_4(split_with_num, In, int, Number, Outs) KERNEL_2(contiguous, In, Out) KERNEL_5(strided_copy, In, Axes, Axes, int64_t, Out)
    // clang-format on

    KERNEL(set_value,
           (In x, Numbers begins, Numbers ends, Numbers steps, Axes axes, Axes gone, Axes fresh, Axes shape, Values values,
            Out out),
           (x, begins, ends, steps, axes, gone, fresh, shape, values, out), In, Numbers, Numbers, Numbers, Axes, Axes, Axes,
           Axes, Values, Out)
    // Memory alone.
    template <typename T, typename Context>
    void empty_kernel(const Context &context, Numbers, Type type, Out out) {
    context.Alloc(out, type);
}

template <typename T, typename Context>
void empty_like_kernel(const Context &context, In, Type type, Out out) {
    context.Alloc(out, type == Type::UNDEFINED ? out->dtype() : type);
}

// The numbers are on the host, which says how many there will be.
template <typename T, typename Context>
void arange_tensor_kernel(const Context &context, In begin, In end, In step, Out out) {
    const int64_t first = *begin.data<T>(), last = *end.data<T>(), distance = *step.data<T>();
    out->Resize({(last - first + distance - 1) / distance});
    launch<In, In, In, Out>("arange_tensor", phi::CppTypeToDataType<T>::Type(), context, begin, end, step, out);
}

// As if those that are named (TOKASIM_WITHOUT, separated by commas) had never been written.
void forget_kernels() {
    const char *names = getenv("TOKASIM_WITHOUT");
    std::stringstream all(names ? names : "");
    for (std::string name; std::getline(all, name, ',');) phi::CustomKernelMap::Instance().Kernels().erase(name);
}

}  // namespace tokasim

#define REGISTER(name, ...) \
    PD_REGISTER_PLUGIN_KERNEL(name, tokasim, ALL_LAYOUT, tokasim::name##_kernel, __VA_ARGS__) {}
#define WHOLE int, int64_t

// clang-format off
REGISTER(add, float, WHOLE) REGISTER(subtract, float, WHOLE) REGISTER(multiply, float, WHOLE) REGISTER(divide, float)
REGISTER(floor_divide, WHOLE) REGISTER(remainder, WHOLE) REGISTER(add_n, float)
REGISTER(equal, float, WHOLE) REGISTER(less_than, float, WHOLE) REGISTER(less_equal, float, WHOLE)
REGISTER(greater_than, float, WHOLE) REGISTER(greater_equal, float, WHOLE) REGISTER(logical_or, bool)
REGISTER(exp, float) REGISTER(rsqrt, float) REGISTER(sigmoid, float) REGISTER(silu, float)
REGISTER(gelu, float)
REGISTER(clip, float, WHOLE) REGISTER(scale, float, WHOLE) REGISTER(where, float, WHOLE)
REGISTER(max, float, WHOLE) REGISTER(min, float, WHOLE) REGISTER(mean, float) REGISTER(sum, float, WHOLE) REGISTER(any, bool)
REGISTER(cumsum, float, WHOLE) REGISTER(topk, float) REGISTER(searchsorted, float, WHOLE) REGISTER(matmul, float)
REGISTER(full, float, WHOLE, bool) REGISTER(full_like, float, WHOLE, bool) REGISTER(arange, float, WHOLE)
REGISTER(assign, float, WHOLE, bool) REGISTER(cast, float, WHOLE, bool) REGISTER(expand, float, WHOLE, bool)
REGISTER(concat, float, WHOLE) REGISTER(gather, float, WHOLE) REGISTER(scatter, float, WHOLE)
REGISTER(take_along_axis, float, WHOLE) REGISTER(contiguous, float, WHOLE, bool) REGISTER(strided_copy, float, WHOLE, bool)
REGISTER(split_with_num, float) REGISTER(set_value, float) REGISTER(empty, float, WHOLE, bool) REGISTER(empty_like, float, WHOLE, bool)
    // clang-format on
    PD_REGISTER_PLUGIN_KERNEL(arange_tensor, tokasim, ALL_LAYOUT, tokasim::arange_tensor_kernel, WHOLE) {
    for (int number = 0; number < 3; number++) kernel->InputAt(number).SetBackend(phi::Backend::ALL_BACKEND);
}
