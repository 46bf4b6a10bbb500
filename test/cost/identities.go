package main

import (
	"context"
	"encoding/base64"
	"fmt"
	"net/http"
	"strings"
)

// unsigned returns a token in the form of a JWT, with header and claims as raw bytes.
func unsigned(header, claims, signature string) string {
	e := base64.RawURLEncoding
	return e.EncodeToString([]byte(header)) + "." + e.EncodeToString([]byte(claims)) + "." +
		e.EncodeToString([]byte(signature))
}

const issuer = "https://kubernetes.default.svc.cluster.local"

// bearer returns a shape that sends n requests, each with its own token.
func bearer(name, about string, n int, token func(i int) string) *shape {
	return &shape{name: name, about: about, run: func(ctx context.Context, a *attempt) {
		c := newOldClient(a.s)
		times(ctx, n, 8, func(i int) {
			a.ask(ctx, request{method: http.MethodGet, path: "/api", client: c,
				header: http.Header{"Authorization": {"Bearer " + token(i)}}})
		})
	}}
}

// impersonating returns a shape that sends n requests of the administrator with impersonation headers.
func impersonating(name, about string, n int, headers func(i int) http.Header) *shape {
	return &shape{name: name, about: about, run: func(ctx context.Context, a *attempt) {
		times(ctx, n, 4, func(i int) {
			a.ask(ctx, request{as: admin, method: http.MethodGet, path: configMaps + "?limit=1", header: headers(i)})
		})
	}}
}

func identities() []*shape {
	return []*shape{
		impersonating("1,000 groups impersonated", "10 requests", 10, func(int) http.Header {
			return http.Header{"Impersonate-User": {"u"}, "Impersonate-Group": many(1000, func(i int) string {
				return fmt.Sprintf("g%d", i)
			})}
		}),
		impersonating("1,000 extras impersonated", "10 requests", 10, func(int) http.Header {
			h := http.Header{"Impersonate-User": {"u"}}
			for i := range 1000 {
				h[fmt.Sprintf("Impersonate-Extra-K%d", i)] = []string{"v"}
			}
			return h
		}),
		impersonating("1,000 users impersonated", "a user each, with a name of 1 kB", 1000, func(i int) http.Header {
			return http.Header{"Impersonate-User": {fmt.Sprintf("%s%d", strings.Repeat("u", 1000), i)}}
		}),
		bearer("tokens of 900 kB", "100 requests", 100, func(i int) string {
			return fmt.Sprintf("%d%s", i, strings.Repeat("x", 900_000))
		}),
		bearer("JWTs with headers of 100 kB", "200 requests", 200, func(i int) string {
			return unsigned(fmt.Sprintf(`{"alg":"RS256","kid":"%s%d"}`, strings.Repeat("x", 100_000), i),
				`{"iss":"`+issuer+`"}`, strings.Repeat("s", 256))
		}),
		bearer("JWTs of this issuer with other signatures", "1,000 requests", 1000, func(i int) string {
			return unsigned(`{"alg":"ES256"}`, fmt.Sprintf(`{"iss":%q,"aud":[%q],"sub":"s%d"}`, issuer, issuer, i),
				strings.Repeat("s", 64))
		}),
		bearer("JWTs with claims of 10,000 levels", "50 requests", 50, func(i int) string {
			return unsigned(`{"alg":"RS256"}`, fmt.Sprintf(`{"iss":%q,"n":%d,"a":`, issuer, i)+
				nested(10_000, `{"a":`, "1", "}")+"}", strings.Repeat("s", 256))
		}),
		bearer("2,000 random tokens", "a token each", 2000, func(i int) string { return fmt.Sprintf("random-%d", i) }),
		certificates(),
	}
}
