// Bindings of functions with plain arguments. Nanobind generates code for each signature, which is slow to compile with a
// dozen arguments: these share one signature, and all arguments of a type share their conversion.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <type_traits>
#include <utility>

namespace tokamak::cpu {

enum class Gil { HELD, RELEASED };  // while the function runs

template <class Value>
__attribute__((noinline)) Value argument(PyObject *given, std::size_t index) {
    Value value{};
    const nanobind::handle from = PyTuple_GET_ITEM(given, index);
    if (nanobind::try_cast(from, value)) return value;
    const std::string text = "argument " + std::to_string(index) + " is " + nanobind::repr(from).c_str();
    throw nanobind::type_error((text + ", which is of another type than this function takes, or too large").c_str());
}

using AnyFunction = void (*)();

template <class Result, class... Arguments, std::size_t... INDEX>
Result apply(AnyFunction function, [[maybe_unused]] PyObject *given, Gil gil, std::index_sequence<INDEX...>) {
    const auto call = [&](std::decay_t<Arguments>... arguments) {
        std::optional<nanobind::gil_scoped_release> released;
        if (gil == Gil::RELEASED) released.emplace();
        return reinterpret_cast<Result (*)(Arguments...)>(function)(std::move(arguments)...);
    };
    return call(argument<std::decay_t<Arguments>>(given, INDEX)...);
}

template <class Result, class... Arguments>
nanobind::object call(AnyFunction function, PyObject *given, Gil gil) {
    constexpr std::index_sequence_for<Arguments...> indices;
    if constexpr (std::is_void_v<Result>) {
        apply<Result, Arguments...>(function, given, gil, indices);
        return nanobind::none();
    } else {
        return nanobind::cast(apply<Result, Arguments...>(function, given, gil, indices));
    }
}

// The Python object of all of them: `call` converts the arguments.
struct Defined {
    AnyFunction function;
    nanobind::object (*call)(AnyFunction function, PyObject *given, Gil gil);
    std::size_t num_arguments;
    const char *name;
    Gil gil;
};

inline void define(nanobind::module_ &module, const Defined &defined) {
    module.def(defined.name, [defined](const nanobind::args &given) {
        if (given.size() != defined.num_arguments) {
            throw nanobind::type_error((std::string(defined.name) + " takes " + std::to_string(defined.num_arguments) +
                                        " arguments, " + std::to_string(given.size()) + " were given")
                                           .c_str());
        }
        return defined.call(defined.function, given.ptr(), defined.gil);
    });
}

template <class Result, class... Arguments>
void define_pointer(nanobind::module_ &module, const char *name, Result (*function)(Arguments...), Gil gil) {
    define(module, {reinterpret_cast<AnyFunction>(function), call<Result, Arguments...>, sizeof...(Arguments), name, gil});
}

// `function` is a function, or a lambda without captures.
template <class Function>
void define(nanobind::module_ &module, const char *name, const Function &function, Gil gil = Gil::HELD) {
    define_pointer(module, name, +function, gil);
}

}  // namespace tokamak::cpu
