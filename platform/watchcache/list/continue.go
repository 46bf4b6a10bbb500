package list

import (
	"encoding/base64"
	"encoding/json"
	"path"
	"strings"

	"watershed.dev/platform/rpc"
)

// continueToken is kube-apiserver's continue token (k8s.io/apiserver/pkg/storage/continue.go). kube-apiserver and the
// replica can therefore continue each other's lists.
type continueToken struct {
	APIVersion      string `json:"v"`
	ResourceVersion int64  `json:"rv"`
	StartKey        string `json:"start"`
}

func encodeContinue(revision int64, start string) string {
	b, _ := json.Marshal(continueToken{"meta.k8s.io/v1", revision, start})
	return base64.RawURLEncoding.EncodeToString(b)
}

// decodeContinue decodes a token. It delegates an invalid token to registry, which returns kube-apiserver's error.
func decodeContinue(token string) (int64, string, error) {
	b, err := base64.RawURLEncoding.DecodeString(token)
	var t continueToken
	if err != nil || json.Unmarshal(b, &t) != nil || t.APIVersion != "meta.k8s.io/v1" || t.ResourceVersion <= 0 ||
		t.StartKey == "" {
		return 0, "", rpc.ErrDelegate
	}
	start := "/" + strings.TrimPrefix(t.StartKey, "/") // kube-apiserver writes keys with and without the slash
	if path.Clean(start) != start {
		return 0, "", rpc.ErrDelegate
	}
	return t.ResourceVersion, start[1:], nil
}
