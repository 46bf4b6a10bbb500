package main

import (
	"crypto/ecdsa"
	"crypto/rsa"
	"crypto/tls"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
)

var loopback = []net.IP{net.IPv4(127, 0, 0, 1)}

// web is an HTTPS server that the test runs. The test's own authority signed its certificate.
type web struct {
	*http.ServeMux
	base string
	ca   *authority
}

func newWeb(t testing.TB) *web {
	t.Helper()
	w := &web{ServeMux: http.NewServeMux(), ca: newAuthority(t, "web")}
	s := httptest.NewUnstartedServer(w)
	s.TLS = &tls.Config{Certificates: []tls.Certificate{w.ca.serving()}}
	s.StartTLS()
	t.Cleanup(s.Close)
	w.base = s.URL
	return w
}

// issuer makes the server an OpenID issuer below a path, with keys by ID, and returns its URL.
func (w *web) issuer(path string, keys map[string]any) string {
	url := w.base + path
	w.HandleFunc(path+"/.well-known/openid-configuration", func(rw http.ResponseWriter, _ *http.Request) {
		_ = json.NewEncoder(rw).Encode(fields{
			"issuer":                                url,
			"jwks_uri":                              url + "/keys",
			"id_token_signing_alg_values_supported": []string{"RS256", "ES256", "PS256"},
		})
	})
	w.HandleFunc(path+"/keys", func(rw http.ResponseWriter, _ *http.Request) {
		var all []fields
		for id, k := range keys {
			all = append(all, jwk(id, k))
		}
		_ = json.NewEncoder(rw).Encode(fields{"keys": all})
	})
	return url
}

// jwk returns a public key as a JWK (RFC 7517).
func jwk(id string, key any) fields {
	number := func(n *big.Int) string { return base64.RawURLEncoding.EncodeToString(n.Bytes()) }
	switch k := key.(type) {
	case *rsa.PrivateKey:
		return fields{"kid": id, "kty": "RSA", "use": "sig", "n": number(k.N), "e": number(big.NewInt(int64(k.E)))}
	case *ecdsa.PrivateKey:
		raw, err := k.PublicKey.Bytes() // 0x04, then both coordinates
		if err != nil {
			return nil
		}
		half := len(raw) / 2
		return fields{
			"kid": id, "kty": "EC", "use": "sig", "crv": k.Curve.Params().Name,
			"x": base64.RawURLEncoding.EncodeToString(raw[1 : 1+half]),
			"y": base64.RawURLEncoding.EncodeToString(raw[1+half:]),
		}
	}
	return nil
}

// reviewer makes the server a TokenReview webhook below a path.
func (w *web) reviewer(path string) {
	w.HandleFunc(path, func(rw http.ResponseWriter, req *http.Request) {
		var r fields
		_ = json.NewDecoder(req.Body).Decode(&r)
		spec, _ := r["spec"].(fields)
		text, _ := spec["token"].(string)
		status := fields{"authenticated": false}
		switch {
		case text == "hook-valid":
			status = fields{"authenticated": true, "user": fields{
				"username": "hooked", "uid": "7", "groups": []string{"hookers", "system:masters-not"},
				"extra": fields{"scope": []string{"a", "b"}},
			}}
		case text == "hook-audience":
			status = fields{
				"authenticated": true,
				"user":          fields{"username": "audient"},
				"audiences":     []string{"elsewhere"},
			}
		case text == "hook-error":
			status = fields{"authenticated": false, "error": "the hook does not like it"}
		case text == "hook-nobody":
			status = fields{"authenticated": true, "user": fields{}}
		case strings.HasPrefix(text, "hook-500"):
			http.Error(rw, "broken", http.StatusInternalServerError)
			return
		case strings.HasPrefix(text, "hook-garbage"):
			_, _ = rw.Write([]byte("{"))
			return
		}
		rw.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(rw).Encode(fields{
			"apiVersion": "authentication.k8s.io/v1",
			"kind":       "TokenReview", "status": status,
		})
	})
}

// webhookKubeconfig writes the kubeconfig of a webhook at a path of the server.
func (a *axis) webhookKubeconfig(dir, name string, w *web, path string) string {
	server, _ := json.Marshal(w.base + path)
	file := dir + "/" + name
	write(a.t, file, fmt.Sprintf(`{"apiVersion":"v1","kind":"Config","current-context":"x",
"clusters":[{"name":"c","cluster":{"server":%s,"certificate-authority-data":%q}}],
"users":[{"name":"u","user":{}}],"contexts":[{"name":"x","context":{"cluster":"c","user":"u"}}]}`,
		server, base64.StdEncoding.EncodeToString(w.ca.pem())))
	return file
}

func write(t testing.TB, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}
