package main

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/binary"
	"fmt"
	"net/http"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// laughs returns YAML whose aliases expand to nine to the power of n values.
func laughs(n int) string {
	var b strings.Builder
	b.WriteString("a0: &a0 [x,x,x,x,x,x,x,x,x]\n")
	for i := 1; i < n; i++ {
		fmt.Fprintf(&b, "a%d: &a%d [%s]\n", i, i, strings.TrimSuffix(strings.Repeat(fmt.Sprintf("*a%d,", i-1), 9), ","))
	}
	fmt.Fprintf(&b, "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: laughs}\ndata: *a%d\n", n-1)
	return b.String()
}

// protobufOf wraps raw bytes in Kubernetes' protobuf envelope.
func protobufOf(raw []byte) []byte {
	u := runtime.Unknown{TypeMeta: runtime.TypeMeta{APIVersion: "v1", Kind: "ConfigMap"}, Raw: raw}
	b, err := u.Marshal()
	if err != nil {
		panic(err)
	}
	return append([]byte("k8s\x00"), b...)
}

func rawConfigMap(data map[string]string) []byte {
	b, err := (&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "body"}, Data: data}).Marshal()
	if err != nil {
		panic(err)
	}
	return b
}

// field encodes a length-delimited protobuf field.
func field(number int, content []byte) []byte {
	b := binary.AppendUvarint(nil, uint64(number)<<3|2)
	return append(binary.AppendUvarint(b, uint64(len(content))), content...)
}

func zipped(content []byte) []byte {
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	_, _ = w.Write(content)
	_ = w.Close()
	return b.Bytes()
}

// post returns a shape that sends one body of a media type to the tenant's ConfigMaps.
func post(name, about, media string, body func() []byte) *shape {
	return posts(name, about, configMaps, media, body)
}

func posts(name, about, path, media string, body func() []byte) *shape {
	return &shape{name: name, about: about, run: func(ctx context.Context, a *attempt) {
		collection, _, _ := strings.Cut(path, "?")
		a.remove(collection + "/body")
		a.write(ctx, tenant, http.MethodPost, path, media, body())
	}}
}

func bodies() []*shape {
	head := `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"body"},`
	wide := func() []byte {
		return append([]byte(head), marshal(keys(150_000, 1))[1:]...)
	}
	return []*shape{
		post("JSON of 10,000 levels", "", jsonMedia, func() []byte {
			return []byte(head + `"data":` + nested(10_000, `{"a":`, `1`, `}`) + `}`)
		}),
		posts("JSON of 150,000 unknown keys, strict", "", configMaps+"?fieldValidation=Strict", jsonMedia, wide),
		post("JSON of 900,000 empty objects", "", jsonMedia, func() []byte {
			return []byte(head + `"x":[` + strings.Repeat(`{},`, 900_000) + `{}]}`)
		}),
		post("YAML aliases that grow ninefold", "", yamlMedia, func() []byte { return []byte(laughs(12)) }),
		post("YAML of 10,000 levels", "flow style", yamlMedia, func() []byte {
			return []byte(
				"apiVersion: v1\nkind: ConfigMap\nmetadata: {name: body}\ndata: " + nested(10_000, "[", "", "]"),
			)
		}),
		post("YAML of 100,000 anchors", "", yamlMedia, func() []byte {
			var b strings.Builder
			b.WriteString("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: body}\nx:\n")
			for i := range 100_000 {
				fmt.Fprintf(&b, "- &a%d x\n", i)
			}
			return []byte(b.String())
		}),
		post("YAML of 60,000 keys", "", yamlMedia, func() []byte {
			var b strings.Builder
			b.WriteString("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: body}\ndata:\n")
			for i := range 60_000 {
				fmt.Fprintf(&b, "  key%d: v\n", i)
			}
			return []byte(b.String())
		}),
		post("protobuf, cut short", "", protobufMedia, func() []byte {
			b := protobufOf(rawConfigMap(map[string]string{"a": strings.Repeat("x", 900_000)}))
			return b[:len(b)/2]
		}),
		post("protobuf with a length of 2^62", "", protobufMedia, func() []byte {
			return protobufOf(append(rawConfigMap(nil), 0x12, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x3f))
		}),
		post("protobuf of 2.9 MB of unknown fields", "", protobufMedia, func() []byte {
			return protobufOf(append(rawConfigMap(nil), bytes.Repeat(field(1000, []byte("x")), 700_000)...))
		}),
		post("protobuf of 700,000 empty managers", "", protobufMedia, func() []byte {
			return protobufOf(field(1, append(field(1, []byte("body")), bytes.Repeat(field(17, nil), 700_000)...)))
		}),
		post("protobuf with groups 1,000,000 levels deep", "", protobufMedia, func() []byte {
			return protobufOf(append(rawConfigMap(nil), bytes.Repeat([]byte{0x9b, 0x3e}, 1_000_000)...))
		}),
		posts("protobuf of 5,000 containers", "", pods, protobufMedia, func() []byte {
			b := field(1, field(1, []byte("body")))
			b = append(b, field(2, bytes.Repeat(field(2, field(1, []byte("c"))), 5000))...)
			u := runtime.Unknown{TypeMeta: runtime.TypeMeta{APIVersion: "v1", Kind: "Pod"}, Raw: b}
			raw, _ := u.Marshal()
			return append([]byte("k8s\x00"), raw...)
		}),
		{
			name:  "gzip of 100 MB, three times",
			about: "Content-Encoding is gzip, deflate, and gzip twice",
			run: func(ctx context.Context, a *attempt) {
				body := zipped(make([]byte, 100_000_000))
				for _, encoding := range []string{"gzip", "deflate", "gzip, gzip"} {
					a.ask(
						ctx,
						request{as: tenant, method: http.MethodPost, path: configMaps, body: body, header: http.Header{
							"Content-Type": {jsonMedia}, "Content-Encoding": {encoding}}},
					)
				}
			},
		},
		post("JSON of 10 MB", "more than is allowed", jsonMedia, func() []byte {
			return []byte(head + `"data":{"a":"` + strings.Repeat("x", 10_000_000) + `"}}`)
		}),
		{
			name: "20 JSON bodies of 3 MB at once",
			run: func(ctx context.Context, a *attempt) {
				body := []byte(head + `"data":{"a":"` + strings.Repeat("x", 2_900_000) + `"}}`)
				times(ctx, 20, 20, func(int) { a.write(ctx, tenant, http.MethodPost, configMaps, jsonMedia, body) })
			},
		},
		{
			name: "DeleteOptions of 2.9 MB",
			run: func(ctx context.Context, a *attempt) {
				a.write(ctx, tenant, http.MethodDelete, configMaps+"/absent", jsonMedia, marshal(object{
					"kind": "DeleteOptions", "apiVersion": "v1",
					"preconditions": object{"uid": strings.Repeat("x", 2_900_000)}}))
			},
		},
	}
}
