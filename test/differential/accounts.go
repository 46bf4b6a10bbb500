package main

import (
	"crypto"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"watershed.dev/test/harness"
)

// keyID is the id that kube-apiserver gives a key (k8s.io/kubernetes/pkg/serviceaccount, keyIDFromPublicKey).
func keyID(t testing.TB, key crypto.Signer) string {
	t.Helper()
	der, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(der)
	return base64.RawURLEncoding.EncodeToString(sum[:])
}

// requestTokens has a side issue tokens.
func (a *axis) requestTokens(s *side, made map[string]string, check func(error)) {
	for name, spec := range map[string]authenticationv1.TokenRequestSpec{
		"requested":          {},
		"requested audience": {Audiences: []string{"elsewhere"}},
		"requested pod": {BoundObjectRef: &authenticationv1.BoundObjectReference{
			APIVersion: "v1", Kind: "Pod", Name: "pod",
		}},
	} {
		got, err := s.server.Client().CoreV1().ServiceAccounts("default").CreateToken(a.t.Context(), "robot",
			&authenticationv1.TokenRequest{Spec: spec}, metav1.CreateOptions{})
		check(err)
		made[name] = got.Status.Token
	}
}

// legacyTokens makes tokens in secrets, as the token controller does: one in force, and one that says it is not.
func (a *axis) legacyTokens(s *side, made map[string]string, check func(error)) {
	key := keyFile(a.t, s.server.SAKey)
	for name, labels := range map[string]map[string]string{
		"legacy":         nil,
		"legacy invalid": {"kubernetes.io/legacy-token-invalid-since": "2020-01-01"},
	} {
		secret := "token-" + fmt.Sprint(len(name))
		j := &token{header: fields{"alg": "ES256", "kid": keyID(a.t, key)}, key: key, claims: fields{
			"iss":                                    "kubernetes/serviceaccount",
			"sub":                                    "system:serviceaccount:default:robot",
			"kubernetes.io/serviceaccount/namespace": "default",
			"kubernetes.io/serviceaccount/secret.name":          secret,
			"kubernetes.io/serviceaccount/service-account.name": "robot",
			"kubernetes.io/serviceaccount/service-account.uid":  made["robot"],
		}}
		made[name] = j.String()
		_, err := s.server.Client().CoreV1().Secrets("default").Create(a.t.Context(), &corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Name: secret, Labels: labels, Annotations: map[string]string{
				"kubernetes.io/service-account.name": "robot", "kubernetes.io/service-account.uid": made["robot"],
			}},
			Type: corev1.SecretTypeServiceAccountToken,
			Data: map[string][]byte{"token": []byte(made[name])},
		}, metav1.CreateOptions{})
		check(err)
	}
}

// bootstrapTokens makes the secrets of bootstrap tokens, good and bad, and waits until the side knows them.
func (a *axis) bootstrapTokens(s *side, check func(error)) {
	secrets := s.server.Client().CoreV1().Secrets(metav1.NamespaceSystem)
	for id, change := range map[string]map[string]string{
		"abcdef": {},
		"expird": {"expiration": time.Now().Add(-time.Hour).UTC().Format(time.RFC3339)},
		"noauth": {"usage-bootstrap-authentication": "false"},
		"nogrps": {"auth-extra-groups": ""},
		"badgrp": {"auth-extra-groups": "system:masters"},
		"zzzzzz": {},
	} {
		data := map[string]string{
			"token-id": id, "token-secret": "0123456789abcdef", "usage-bootstrap-authentication": "true",
			"auth-extra-groups": "system:bootstrappers:workers",
		}
		for k, v := range change {
			data[k] = v
		}
		_, err := secrets.Create(a.t.Context(), &corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Name: "bootstrap-token-" + id},
			Type:       corev1.SecretTypeBootstrapToken,
			StringData: data,
		}, metav1.CreateOptions{})
		check(err)
	}
	r := plain()[0]
	r.as, r.header = nobody, merged(r.header, map[string]string{"Authorization": "Bearer zzzzzz.0123456789abcdef"})
	harness.Eventually(a.t, 20*time.Second, func() error {
		if got := s.do(a.t.Context(), r); got.code != 201 {
			return fmt.Errorf("%s does not know its bootstrap tokens: %d %s", s.name, got.code, got.body)
		}
		return nil
	})
}

// hook writes the kubeconfig of a webhook at a path of the server.
func (a *axis) hook(dir, name string, w *web, path string) string {
	server, _ := json.Marshal(w.base + path)
	file := dir + "/" + name
	write(a.t, file, fmt.Sprintf(`{"apiVersion":"v1","kind":"Config","current-context":"x",
"clusters":[{"name":"c","cluster":{"server":%s,"certificate-authority-data":%q}}],
"users":[{"name":"u","user":{}}],"contexts":[{"name":"x","context":{"cluster":"c","user":"u"}}]}`,
		server, base64.StdEncoding.EncodeToString(w.ca.pem())))
	return file
}
