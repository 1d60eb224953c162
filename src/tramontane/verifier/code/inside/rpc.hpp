// Calls of C++ functions from another process. Plain values are sent, encoded by their static types.
// This text stands before the program's and before the tests': neither can change its meaning.
#ifndef TRAMONTANE_LEAN
#include <bits/stdc++.h>
#else  // for a program with names that are ambiguous next to the whole library
#include <array>
#include <complex>
#include <cstdint>
#include <cstring>
#include <deque>
#include <list>
#include <map>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <vector>
#endif

namespace tramontane {

// System calls, by symbols that no variable of a program can have.
long system_send(int, const void*, std::size_t, int) asm("__send");
long system_read(int, void*, std::size_t) asm("__read");
long system_write(int, const void*, std::size_t) asm("__write");
[[noreturn]] void system_exit(int) asm("_exit");

constexpr int channel = 3, gone = 97, no_signal = 0x4000;  // MSG_NOSIGNAL
constexpr std::size_t frame_bytes = 16 << 20;
using bytes = std::string;

struct garbage : std::exception {
    const char* what() const noexcept override { return "answered with no value"; }
};

// ------------------------------------------------------------------- types that can travel

template <class T> struct travels : std::is_arithmetic<T> {};
template <class... E> struct all_travel : std::bool_constant<(travels<std::remove_cv_t<E>>::value && ...)> {};
template <class C, class... E> struct travels<std::basic_string<C, E...>> : travels<C> {};
template <class T, class... E> struct travels<std::vector<T, E...>> : travels<T> {};
template <class T, class... E> struct travels<std::deque<T, E...>> : travels<T> {};
template <class T, class... E> struct travels<std::list<T, E...>> : travels<T> {};
template <class T, class... E> struct travels<std::set<T, E...>> : travels<T> {};
template <class T, class... E> struct travels<std::multiset<T, E...>> : travels<T> {};
template <class T, class... E> struct travels<std::unordered_set<T, E...>> : travels<T> {};
template <class T, class... E> struct travels<std::unordered_multiset<T, E...>> : travels<T> {};
template <class K, class V, class... E> struct travels<std::map<K, V, E...>> : all_travel<K, V> {};
template <class K, class V, class... E> struct travels<std::multimap<K, V, E...>> : all_travel<K, V> {};
template <class K, class V, class... E> struct travels<std::unordered_map<K, V, E...>> : all_travel<K, V> {};
template <class K, class V, class... E> struct travels<std::unordered_multimap<K, V, E...>> : all_travel<K, V> {};
template <class T, std::size_t N> struct travels<std::array<T, N>> : travels<T> {};
template <class A, class B> struct travels<std::pair<A, B>> : all_travel<A, B> {};
template <class... E> struct travels<std::tuple<E...>> : all_travel<E...> {};
template <class T> struct travels<std::optional<T>> : travels<T> {};
template <class T> struct travels<std::complex<T>> : travels<T> {};

// The type that holds an argument of type A while the function runs.
template <class A> struct held { using type = std::remove_cvref_t<A>; };
template <class A> requires std::is_same_v<std::decay_t<A>, const char*> struct held<A> { using type = std::string; };
template <class A> requires std::is_same_v<std::remove_cvref_t<A>, std::string_view> struct held<A> { using type = std::string; };
template <class A> using held_t = typename held<A>::type;

template <class A> constexpr bool comes_back =
    std::is_lvalue_reference_v<A> && !std::is_const_v<std::remove_reference_t<A>>;

// ------------------------------------------------------------------------ values as bytes

template <class T> struct is_optional : std::false_type {};
template <class T> struct is_optional<std::optional<T>> : std::true_type {};
template <class T> struct is_complex : std::false_type {};
template <class T> struct is_complex<std::complex<T>> : std::true_type {};
template <class T> concept product = requires { std::tuple_size<T>::value; };
template <class T> concept numbers = requires(T x) {
    x.data();
    requires std::is_arithmetic_v<typename T::value_type>;
} && !std::is_same_v<T, std::vector<bool>>;

template <class T> void put(bytes& out, const T& value) {
    if constexpr (std::is_arithmetic_v<T>) {
        out.append(reinterpret_cast<const char*>(&value), sizeof value);
    } else if constexpr (is_complex<T>::value) {
        put(out, value.real());
        put(out, value.imag());
    } else if constexpr (is_optional<T>::value) {
        put(out, value.has_value());
        if (value) put(out, *value);
    } else if constexpr (product<T>) {
        std::apply([&](const auto&... part) { (put(out, part), ...); }, value);
    } else {
        put(out, static_cast<std::uint32_t>(value.size()));
        if constexpr (numbers<T>) {
            out.append(reinterpret_cast<const char*>(value.data()),
                       value.size() * sizeof(typename T::value_type));
        } else {
            for (auto&& part : value) put(out, static_cast<const typename T::value_type&>(part));
        }
    }
}

struct reader {
    const char* position;
    const char* end;
    void take(void* to, std::size_t size) {
        if (size > static_cast<std::size_t>(end - position)) throw garbage();
        if (size) std::memcpy(to, position, size);
        position += size;
    }
};

template <class T> T get(reader& in);

template <class T> struct made {  // a value with parts
    static T from(reader& in) { T value; for (auto& part : value) part = get<typename T::value_type>(in); return value; }
};
template <class A, class B> struct made<std::pair<A, B>> {
    static auto from(reader& in) {
        return std::pair<std::remove_cv_t<A>, B>{get<std::remove_cv_t<A>>(in), get<B>(in)};
    }
};
template <class... E> struct made<std::tuple<E...>> {
    static std::tuple<E...> from(reader& in) { return std::tuple<E...>{get<E>(in)...}; }
};

template <class T> T get(reader& in) {
    if constexpr (std::is_same_v<T, bool>) {
        unsigned char value;
        in.take(&value, 1);
        if (value > 1) throw garbage();
        return value == 1;
    } else if constexpr (std::is_arithmetic_v<T>) {
        T value;
        in.take(&value, sizeof value);
        return value;
    } else if constexpr (is_complex<T>::value) {
        auto real = get<typename T::value_type>(in);
        return T(real, get<typename T::value_type>(in));
    } else if constexpr (is_optional<T>::value) {
        return get<bool>(in) ? T(get<typename T::value_type>(in)) : T();
    } else if constexpr (product<T>) {
        return made<T>::from(in);
    } else {
        auto size = get<std::uint32_t>(in);
        T value;
        if constexpr (numbers<T>) {
            if (size > static_cast<std::size_t>(in.end - in.position) / sizeof(typename T::value_type)) throw garbage();
            value.resize(size);
            in.take(value.data(), size * sizeof(typename T::value_type));
        } else {
            if (size > static_cast<std::size_t>(in.end - in.position)) throw garbage();
            while (size--) {
                if constexpr (product<typename T::value_type>) {
                    value.insert(value.end(), made<typename T::value_type>::from(in));
                } else {
                    value.insert(value.end(), get<typename T::value_type>(in));
                }
            }
        }
        return value;
    }
}

// ------------------------------------------------------------------------------ frames

inline bool send(const bytes& data) {
    std::uint32_t size = data.size();
    bytes frame(reinterpret_cast<const char*>(&size), sizeof size);
    frame += data;
    for (std::size_t sent = 0; sent < frame.size();) {
        auto n = system_send(channel, frame.data() + sent, frame.size() - sent, no_signal);
        if (n <= 0) return false;
        sent += n;
    }
    return true;
}

inline bool receive(char* to, std::size_t size) {
    while (size) {
        auto n = system_read(channel, to, size);
        if (n <= 0) return false;
        to += n;
        size -= n;
    }
    return true;
}

inline bool receive(bytes& data) {
    std::uint32_t size;
    if (!receive(reinterpret_cast<char*>(&size), sizeof size)) return false;
    if (size > frame_bytes) throw garbage();
    data.resize(size);
    return receive(data.data(), size);
}

// --------------------------------------------------------------------------- exceptions

template <class... E> struct errors {
    static unsigned char number(const std::exception& error) {
        unsigned char i = 1, found = 0;
        ((found = found ? found : dynamic_cast<const E*>(&error) ? i : 0, ++i), ...);
        return found;
    }
    static void raise(unsigned char number, const std::string& what) {
        unsigned char i = 1;
        (([&] { if (i++ == number) throw E(what); })(), ...);
        throw std::runtime_error(what);
    }
};
struct no_memory : std::bad_alloc {
    no_memory() = default;
    explicit no_memory(const std::string&) {}
};
using known = errors<std::out_of_range, std::invalid_argument, std::domain_error, std::length_error,
                     std::logic_error, std::overflow_error, std::underflow_error, std::range_error>;
constexpr unsigned char out_of_memory = 254, other = 255;

// -------------------------------------------------------------------- the program's process

using function = void (*)();
using handler = void (*)(function, reader&, bytes&);
inline std::vector<std::pair<function, handler>>& table() {
    static std::vector<std::pair<function, handler>> functions;
    return functions;
}

template <class A> decltype(auto) pass(held_t<A>& value) {
    if constexpr (std::is_same_v<std::decay_t<A>, const char*>) return value.c_str();
    else if constexpr (std::is_same_v<std::remove_cvref_t<A>, std::string_view>) return std::string_view(value);
    else if constexpr (std::is_lvalue_reference_v<A>) return static_cast<std::remove_reference_t<A>&>(value);
    else return std::move(value);
}

// The tests' side reads the signature from this function's symbol.
template <int number, class R, class... A> __attribute__((noinline, used)) bool exported(R (*f)(A...)) {
    if constexpr (((std::is_void_v<R> || travels<std::remove_cvref_t<R>>::value) && ... && travels<held_t<A>>::value)) {
        table().resize(std::max<std::size_t>(table().size(), number + 1));
        table()[number] = {reinterpret_cast<function>(f), [](function g, reader& in, bytes& out) {
            std::tuple<held_t<A>...> args{get<held_t<A>>(in)...};
            put(out, static_cast<unsigned char>(0));
            std::apply([&](auto&... arg) {
                auto call = reinterpret_cast<R (*)(A...)>(g);
                if constexpr (std::is_void_v<R>) call(pass<A>(arg)...);
                else put(out, static_cast<const std::remove_cvref_t<R>&>(call(pass<A>(arg)...)));
                ([&] { if constexpr (comes_back<A>) put(out, arg); }(), ...);
            }, args);
        }};
    }
    return true;
}

inline int serve() {
    for (bytes data; receive(data);) {
        reader in{data.data(), data.data() + data.size()};
        bytes out;
        auto failed = [&](unsigned char number, const char* what) {
            out.clear();
            put(out, number);
            put(out, std::string(what));
        };
        try {
            auto [f, handle] = table().at(get<std::uint32_t>(in));
            handle(f, in, out);
        } catch (const std::bad_alloc& error) {
            failed(out_of_memory, error.what());
        } catch (const std::exception& error) {
            auto number = known::number(error);
            failed(number ? number : other, error.what());
        } catch (...) {
            failed(other, "an exception that is no std::exception");
        }
        if (!send(out)) break;
    }
    return gone;
}

// ---------------------------------------------------------------------- the tests' process

[[noreturn]] inline void leave(int code, const char* what) {
    system_write(2, what, std::strlen(what));
    system_exit(code);
}

template <class A> void put_held(bytes& out, const std::remove_reference_t<A>& value) {
    put(out, static_cast<const held_t<A>&>(held_t<A>(value)));
}

template <class R, class... A> R call(std::uint32_t number, std::remove_reference_t<A>&... args) {
    bytes data;
    put(data, number);
    (put_held<A>(data, args), ...);
    try {
        if (!send(data) || !receive(data)) leave(gone, "");
        reader in{data.data(), data.data() + data.size()};
        if (auto failed = get<unsigned char>(in)) {
            auto what = get<std::string>(in);
            if (failed == out_of_memory) throw no_memory();
            known::raise(failed, what);
        }
        auto finish = [&] {
            ([&] { if constexpr (comes_back<A>) args = get<std::remove_cvref_t<A>>(in); }(), ...);
            if (in.position != in.end) throw garbage();
        };
        if constexpr (std::is_void_v<R>) {
            finish();
        } else {
            R result = get<R>(in);
            finish();
            return result;
        }
    } catch (const garbage& error) {
        leave(1, error.what());
    }
}

}  // namespace tramontane
