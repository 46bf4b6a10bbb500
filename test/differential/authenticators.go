package main

import (
	"crypto/elliptic"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"watershed.dev/test/harness"
)

// accountIssuer is the issuer of service account tokens (harness.Twins).
const accountIssuer = "https://kubernetes.default.svc.cluster.local"

// credentials are the credentials that a configuration accepts and rejects, by name.
type credentials struct {
	tokens       map[string]func(*side) string
	certificates []*certificate
}

// authenticators sends every kind of credential, valid and invalid in each way, to servers with every authenticator.
// OpenID Connect is configured once by flags and once by an AuthenticationConfiguration.
func (x *axes) authenticators() {
	x.configuration("authenticators by flags", harness.Twins, func(a *axis, dir string, w *web) []string {
		return append(a.everyAuthenticator(dir, w),
			"--oidc-issuer-url="+w.base+"/flags", "--oidc-client-id=kubernetes",
			"--oidc-ca-file="+w.ca.file(filepath.Join(dir, "oidc-ca.crt")),
			"--oidc-username-claim=email", "--oidc-groups-claim=groups", "--oidc-groups-prefix=oidc:",
			"--oidc-required-claim=team=a", "--oidc-signing-algs=RS256,ES256")
	}, func(a *axis, p *pair, w *web, _ string) { a.everyCredential(p, w.base+"/flags", "kubernetes") })
	x.configuration("authenticators by configuration", harness.Twins, func(a *axis, dir string, w *web) []string {
		return append(a.everyAuthenticator(dir, w), "--authentication-config="+a.structured(dir, w))
	}, func(a *axis, p *pair, w *web, _ string) {
		a.everyCredential(p, w.base+"/flags", "kubernetes")
		a.structuredTokens(p, w)
	})
	x.configuration("nobody without a credential", harness.Twins, func(a *axis, dir string, w *web) []string {
		return append(a.everyAuthenticator(dir, w), "--anonymous-auth=false", "--api-audiences=api,other")
	}, func(a *axis, p *pair, w *web, _ string) { a.everyCredential(p, w.base+"/nobody", "x") })
}

// everyAuthenticator writes the authenticators' files, and returns the flags that name them.
func (a *axis) everyAuthenticator(dir string, w *web) []string {
	rsaKey := newRSA(a.t)
	a.keys = map[string]any{"rsa": rsaKey, "ec": newKey(a.t, elliptic.P256()), "ec384": newKey(a.t, elliptic.P384())}
	for _, path := range []string{"/flags", "/second", "/third"} {
		w.issuer(path, a.keys)
	}
	w.reviewer("/review")
	a.webhookKubeconfig(dir, "token-webhook", w, "/review")
	write(a.t, filepath.Join(dir, "tokens.csv"), `filed-alice,alice,1,"readers,system:masters-not"
filed-bob,bob,2
filed-comma,"car,ol",3,"a,b c"
filed-system,system:anonymous,4
filed-node,system:node:n1,5,system:nodes
filed-sa,system:serviceaccount:default:default,6,system:serviceaccounts
filed-empty-groups,dora,7,
filed-ünï,ünï,8
`)
	return []string{
		"--token-auth-file=" + filepath.Join(dir, "tokens.csv"),
		"--authentication-token-webhook-config-file=" + filepath.Join(dir, "token-webhook"),
		"--authentication-token-webhook-version=v1",
		"--enable-bootstrap-token-auth=true",
		"--requestheader-uid-headers=X-Remote-Uid",
	}
}

// structured writes an AuthenticationConfiguration with several issuers, and returns its path.
func (a *axis) structured(dir string, w *web) string {
	ca, _ := json.Marshal(string(w.ca.pem()))
	path := filepath.Join(dir, "authentication.yaml")
	write(a.t, path, fmt.Sprintf(`apiVersion: apiserver.config.k8s.io/v1
kind: AuthenticationConfiguration
anonymous:
  enabled: true
  conditions: [{path: /livez}, {path: /readyz}, {path: /version}]
jwt:
- issuer: {url: %[1]s/flags, certificateAuthority: %[2]s, audiences: [kubernetes]}
  claimMappings:
    username: {claim: email, prefix: ""}
    groups: {claim: groups, prefix: "oidc:"}
  claimValidationRules: [{claim: team, requiredValue: a}]
- issuer:
    url: %[1]s/second
    discoveryURL: %[1]s/third/.well-known/openid-configuration
    certificateAuthority: %[2]s
    audiences: [one, two]
    audienceMatchPolicy: MatchAny
  claimMappings:
    username: {expression: "claims.sub + '@second'"}
    groups: {expression: "has(claims.roles) ? dyn(claims.roles) : dyn([])"}
    uid: {expression: "claims.jti"}
    extra:
    - {key: example.com/tenant, valueExpression: "claims.tenant"}
    - {key: example.com/nested, valueExpression: "has(claims.deep) ? string(claims.deep.level) : ''"}
  claimValidationRules:
  - {expression: "claims.exp - claims.iat <= 86400", message: "a day at most"}
  - {expression: "!has(claims.email) || claims.email_verified == true", message: "unverified"}
  userValidationRules:
  - {expression: "!user.username.startsWith('system:')", message: "no system names"}
  - {expression: "user.groups.all(g, !g.startsWith('system:'))", message: "no system groups"}
- issuer: {url: %[1]s/third, certificateAuthority: %[2]s, audiences: [third]}
  claimMappings:
    username: {claim: sub, prefix: "third-"}
`, w.base, ca))
	return path
}

// everyCredential sends every credential.
func (a *axis) everyCredential(p *pair, issuer, audience string) {
	c := &credentials{tokens: map[string]func(*side) string{}}
	a.opaque(c)
	a.accounts(p, c)
	for name, j := range a.openID(issuer, audience) {
		c.tokens["openid "+name] = func(*side) string { return j.String() }
	}
	a.certificates(p, c)
	a.waitForIssuer(p, issuer, audience)
	for _, name := range slices.Sorted(maps.Keys(c.tokens)) {
		a.tokenForms(p, name, c.tokens[name])
	}
	for _, cert := range c.certificates {
		for _, r := range plain() {
			r.as, r.about = cert, "certificate "+cert.name
			p.askLater(r)
		}
		r := plain()[0] // with a token beside the certificate
		r.as, r.about = cert, "certificate and token: "+cert.name
		r.header = merged(r.header, map[string]string{"Authorization": "Bearer filed-bob"})
		p.askLater(r)
	}
	a.frontProxy(p)
	a.schemes(p)
	a.issuerDocuments(p)
}

// waitForIssuer waits until the servers have fetched the issuer's keys, because they reject its tokens until then.
func (a *axis) waitForIssuer(p *pair, issuer, audience string) {
	if strings.HasSuffix(issuer, "/nobody") {
		return
	}
	good := a.openID(issuer, audience)["valid"]
	r := plain()[0]
	r.as = noCertificate
	r.more = func(*side) http.Header { return http.Header{"Authorization": {"Bearer " + good.String()}} }
	for _, s := range []*side{p.theirs, p.ours} {
		harness.Eventually(a.t, harness.Soon, func() error {
			if got := s.do(a.t.Context(), r); got.code != http.StatusCreated {
				return fmt.Errorf("%s rejects the tokens of %s: %d %s", s.name, issuer, got.code, got.body)
			}
			return nil
		})
	}
}

var noCertificate = &certificate{name: "none"}

// plain returns requests for the user's identity, for an object that needs a permission, and for a public page.
func plain() []*request {
	return []*request{
		{
			method: http.MethodPost, path: "/apis/authentication.k8s.io/v1/selfsubjectreviews",
			header: map[string]string{"Content-Type": "application/json"},
			body:   []byte(`{"apiVersion":"authentication.k8s.io/v1","kind":"SelfSubjectReview"}`),
		},
		{method: http.MethodGet, path: "/api/v1/namespaces/default"},
		{method: http.MethodGet, path: "/version"},
	}
}

// tokenForms sends a token in each way that a client can send it.
func (a *axis) tokenForms(p *pair, name string, value func(*side) string) {
	for _, r := range plain() {
		r.as, r.about = noCertificate, "bearer: "+name
		r.more = func(s *side) http.Header { return http.Header{"Authorization": {"Bearer " + value(s)}} }
		p.askLater(r)
	}
	r := plain()[1]
	r.as, r.about = noCertificate, "subprotocol: "+name
	r.more = func(s *side) http.Header {
		return http.Header{
			"Connection": {"Upgrade"}, "Upgrade": {"websocket"}, "Sec-Websocket-Version": {"13"},
			"Sec-Websocket-Protocol": {
				"base64url.bearer.authorization.k8s.io." + base64.RawURLEncoding.EncodeToString(
					[]byte(value(s)),
				) + ", v4.channel.k8s.io",
			},
		}
	}
	p.askLater(r)
	for _, audiences := range []string{`[]`, `["` + accountIssuer + `"]`, `["elsewhere"]`, `["elsewhere","api"]`} {
		p.askLater(a.review(name, value, audiences))
	}
}

// review returns the administrator's TokenReview of a token.
func (a *axis) review(name string, value func(*side) string, audiences string) *request {
	r := &request{
		method: http.MethodPost, path: "/apis/authentication.k8s.io/v1/tokenreviews", about: "review: " + name,
		header: map[string]string{"Content-Type": "application/json"},
	}
	r.bodyOf = func(s *side) []byte {
		text, _ := json.Marshal(value(s))
		return fmt.Appendf(
			nil,
			`{"apiVersion":"authentication.k8s.io/v1","kind":"TokenReview","spec":{"token":%s,"audiences":%s}}`,
			text,
			audiences,
		)
	}
	return r
}

// opaque adds tokens that are not JWTs.
func (a *axis) opaque(c *credentials) {
	for _, t := range []string{
		"filed-alice", "filed-bob", "filed-comma", "filed-system", "filed-node", "filed-sa", "filed-empty-groups",
		"FILED-ALICE", "filed-alic", "filed-alicee", "filed-ünï", "unknown",
		"hook-valid", "hook-audience", "hook-error", "hook-nobody", "hook-500", "hook-garbage",
		"abcdef.0123456789abcdef", "abcdef.0123456789abcdeX", "expird.0123456789abcdef", "noauth.0123456789abcdef",
		"nogrps.0123456789abcdef", "badgrp.0123456789abcdef", "delete.0123456789abcdef", "abcdef.", ".0123456789abcdef",
		"ABCDEF.0123456789ABCDEF", "a.b.c", "..", "...", "a.b", strings.Repeat("a", 20000),
		strings.Repeat("a.b.", 3000), "with space", "tab\tbed", "quote\"d", "{}", "null", "=", "%00",
	} {
		name := t
		if len(name) > 30 {
			name = fmt.Sprintf("%.10s… of %d", t, len(t))
		}
		c.tokens["opaque "+name] = func(*side) string { return t }
	}
}

// structuredTokens sends tokens of the issuers that only the AuthenticationConfiguration accepts.
func (a *axis) structuredTokens(p *pair, w *web) {
	now := time.Now()
	base := fields{"iss": w.base + "/second", "aud": "two", "sub": "zoe", "jti": "42", "tenant": "acme",
		"iat": now.Unix(), "exp": now.Add(time.Hour).Unix()}
	for name, change := range map[string]fields{
		"valid":              nil,
		"roles":              {"roles": []string{"x", "y"}},
		"nested":             {"deep": fields{"level": 3}},
		"roles are text":     {"roles": "x"},
		"no tenant":          {"tenant": nil},
		"tenants":            {"tenant": []string{"a", "b"}},
		"empty tenant":       {"tenant": ""},
		"too long":           {"exp": now.Add(48 * time.Hour).Unix()},
		"unverified":         {"email": "a@b", "email_verified": false},
		"verified":           {"email": "a@b", "email_verified": true},
		"verified missing":   {"email": "a@b"},
		"no uid":             {"jti": nil},
		"uid is a number":    {"jti": 42},
		"system name":        {"sub": "system:x"},
		"no subject":         {"sub": nil},
		"empty subject":      {"sub": ""},
		"subject is odd":     {"sub": 1},
		"other audience":     {"aud": "one"},
		"both audiences":     {"aud": []string{"one", "two"}},
		"third's":            {"aud": "third", "iss": w.base + "/third"},
		"third's, wrong":     {"aud": "one", "iss": w.base + "/third"},
		"third's, no sub":    {"aud": "third", "iss": w.base + "/third", "sub": nil},
		"first's audience":   {"aud": "kubernetes"},
		"claims of deep CEL": {"deep": "not an object"},
	} {
		j := &token{header: fields{"alg": "ES256", "kid": "ec"}, claims: merge(base, change), key: a.keys["ec"]}
		a.tokenForms(p, "second issuer: "+name, func(*side) string { return j.String() })
	}
}

func merge(a, b fields) fields {
	out := maps.Clone(a)
	for k, v := range b {
		if out[k] = v; v == nil {
			delete(out, k)
		}
	}
	return out
}

// frontProxy sends a front proxy's headers, with allowed and with other client certificates.
func (a *axis) frontProxy(p *pair) {
	ca := authorityOf(a.t, p.theirs.server.CA)
	by := func(cn string) *certificate { return ca.sign(cn, template(pkix.Name{CommonName: cn})) }
	proxies := []*certificate{by("front-proxy-client"), by("another-client"), noCertificate,
		newAuthority(a.t, "other").sign("stranger", template(pkix.Name{CommonName: "front-proxy-client"}))}
	for name, headers := range map[string]http.Header{
		"a user":        {"X-Remote-User": {"fred"}},
		"groups":        {"X-Remote-User": {"fred"}, "X-Remote-Group": {"a", "b"}},
		"groups in one": {"X-Remote-User": {"fred"}, "X-Remote-Group": {"a,b"}},
		"extra": {"X-Remote-User": {"fred"}, "X-Remote-Extra-Scopes": {"x", "y"},
			"X-Remote-Extra-Acme.com%2fproject": {"p"}},
		"extra, odd":      {"X-Remote-User": {"fred"}, "X-Remote-Extra-%zz": {"x"}, "X-Remote-Extra-": {"none"}},
		"a uid":           {"X-Remote-User": {"fred"}, "X-Remote-Uid": {"u1"}},
		"masters":         {"X-Remote-User": {"fred"}, "X-Remote-Group": {"system:masters"}},
		"two users":       {"X-Remote-User": {"fred", "root"}},
		"an empty user":   {"X-Remote-User": {""}},
		"groups alone":    {"X-Remote-Group": {"system:masters"}},
		"anonymous":       {"X-Remote-User": {"system:anonymous"}},
		"and a token":     {"X-Remote-User": {"fred"}, "Authorization": {"Bearer filed-bob"}},
		"and a bad token": {"X-Remote-User": {"fred"}, "Authorization": {"Bearer nonsense"}},
		"and impersonates": {"X-Remote-User": {"fred"}, "X-Remote-Group": {"system:masters"},
			"Impersonate-User": {"gina"}},
		"a space": {"X-Remote-User": {" fred "}},
		"nothing": {},
	} {
		for _, proxy := range proxies {
			for _, r := range plain() {
				r.as, r.about = proxy, "front proxy "+proxy.name+": "+name
				r.more = func(*side) http.Header { return headers }
				p.askLater(r)
			}
		}
	}
}

// schemes sends valid tokens in unusual Authorization headers.
func (a *axis) schemes(p *pair) {
	basic := "Basic " + base64.StdEncoding.EncodeToString([]byte("alice:filed-alice"))
	for _, values := range [][]string{
		{"bearer filed-alice"}, {"BEARER filed-alice"}, {"bEaReR filed-alice"}, {"Bearer  filed-alice"},
		{" Bearer filed-alice"}, {"Bearer filed-alice "}, {"Bearer filed-alice x"}, {"Bearer x filed-alice"},
		{"Bearer\tfiled-alice"}, {"Bearer"}, {"Bearer "}, {"Bearer  "}, {"Token filed-alice"}, {"filed-alice"}, {""},
		{basic}, {"Basic"}, {"Basic !"}, {"Digest x"}, {"Negotiate x"},
		{"Bearer filed-alice", "Bearer filed-bob"}, {"Bearer nonsense", "Bearer filed-bob"},
		{"Bearer filed-alice", "Bearer nonsense"}, {"Bearer filed-alice, Bearer filed-bob"}, {"", "Bearer filed-alice"},
		{basic, "Bearer filed-alice"}, {"Bearer filed-alice", basic},
	} {
		for _, as := range []*certificate{noCertificate, nil} {
			for _, r := range plain() {
				r.as, r.about = as, fmt.Sprintf("authorization %q", values)
				r.more = func(*side) http.Header { return http.Header{"Authorization": values} }
				p.askLater(r)
			}
		}
	}
	bearer := "base64url.bearer.authorization.k8s.io."
	good := bearer + base64.RawURLEncoding.EncodeToString([]byte("filed-alice"))
	for _, values := range [][]string{
		{good}, {good + ", v4.channel.k8s.io"}, {"v4.channel.k8s.io", good}, {good, good, "x"},
		{good + "," + good + ",x"}, {bearer + ", x"}, {bearer + "!!!, x"}, {bearer + "_w, x"},
		{strings.ToUpper(good) + ", x"}, {"x"}, {""}, {","},
		{good + "=, x"}, {" " + good + " , x "},
	} {
		for _, upgrade := range []http.Header{
			{"Connection": {"Upgrade"}, "Upgrade": {"websocket"}},
			{"Connection": {"keep-alive, Upgrade"}, "Upgrade": {"WebSocket"}}, {},
		} {
			for _, r := range plain() {
				r.as, r.about = noCertificate, fmt.Sprintf("subprotocol %q", values)
				r.more = func(*side) http.Header {
					h := upgrade.Clone()
					h["Sec-Websocket-Protocol"] = values
					return h
				}
				p.askLater(r)
			}
		}
	}
}

// issuerDocuments requests the OpenID documents of the service account issuer.
func (a *axis) issuerDocuments(p *pair) {
	for _, as := range []*certificate{nil, noCertificate} {
		for _, path := range []string{"/.well-known/openid-configuration", "/openid/v1/jwks", "/.well-known/",
			"/openid/v1", "/.well-known/openid-configuration/"} {
			for _, accept := range []string{"", "application/json", "application/jwk-set+json", "text/plain"} {
				r := &request{
					method: http.MethodGet,
					path:   path,
					as:     as,
					about:  "OpenID documents",
					header: map[string]string{},
				}
				if accept != "" {
					r.header["Accept"] = accept
				}
				p.askLater(r)
			}
		}
	}
}
